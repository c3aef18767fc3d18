"""`python -m instar` is the command `instar`."""

from instar.cli.main import entry

if __name__ == "__main__":
    entry()
