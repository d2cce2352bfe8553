"""Cells whose saved outputs nbval takes, and such as it refuses though nothing has changed."""

NBVAL_TAKES = {
    "a bar that goes": "import sys\nfrom tqdm import tqdm\n"
    "for _ in tqdm(range(3), leave=False):\n    pass\nn = sys.stderr.write('after\\n')",
    "a bar that stays": "for _ in tqdm(range(3), bar_format='{n}'):\n    pass",
    "the end of a stream": "print('10%', end='\\r')\nprint('100%')\nprint('end', end='\\r')",
    "on both sides of a picture": "print('x', end='')\ndisplay(1)\nprint('a\\rb')",
    "Windows' line ends": "print('a\\r')\nprint('b\\r\\r\\nc')",
    "a value": "6 * 7",
    "the last value": "_",
}
NBVAL_REFUSES = {  # CONTRIBUTING says so; tests/test_notebooks.py finds them in pages
    "a semicolon": "1 + 1;  # not shown",
    "cleared": "from IPython.display import clear_output\nprint('a')\nclear_output()\nprint('b')",
    "updated": "h = display(1, display_id=True)\nh.update(2)",
    "updated by name": "from IPython.display import update_display\n"
    "h = display(1, display_id='a')\nupdate_display(2, display_id='a')",
    "Out": "Out[6]",
    "a numbered value": "_6",
    "In": "In[6]",
    "a numbered input": "_i6",
}
