"""How the ranks train one model together: replicas, virtual ranks, local steps, shards."""
