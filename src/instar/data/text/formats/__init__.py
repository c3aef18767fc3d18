"""The formats that rows are read from."""
