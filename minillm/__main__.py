"""`python -m minillm` is the command line of `minillm.cli`."""

from minillm.cli import run

if __name__ == "__main__":
    run()
