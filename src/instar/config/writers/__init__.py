"""Configs as text for people: starters with every key explained, and files with other values in them."""
