"""`python -m minillm` is the command line of `minillm.cli.main`."""

from minillm.cli.main import run

if __name__ == "__main__":
    run()
