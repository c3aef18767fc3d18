"""Operations on a live run: found due, carried out on all ranks, proved."""
