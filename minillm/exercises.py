"""Stands in for the folder `exercises/`, which wheels leave out, and says how to get it."""

raise ImportError(
    "The graders and the figure style of the pages are in the repository of the course, not in the "
    "wheel: clone it, and run `pip install --editable .` there."
)
