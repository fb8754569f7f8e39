"""`python -m rkr` is the command `rkr`."""

from rkr.cli import main

if __name__ == "__main__":
    main()
