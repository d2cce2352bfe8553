"""The command line: `python -m minillm`."""
