"""The look of every figure, set once.

Axes carry lower-case labels and no titles: a figure's claim is in its caption. Colour never stands alone; a
marker or a line style says the same thing again.
"""

from pathlib import Path

import matplotlib.pyplot as plt

STYLE = Path(__file__).with_name("kvbook.mplstyle")

# Okabe and Ito's palette, told apart by readers with any of the common colour vision deficiencies. Its yellow
# is left out: on white it has too little contrast for a line.
BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
ORANGE = "#E69F00"
BLACK = "#000000"
# What is published elsewhere, and reference lines: beside ours, never louder.
GREY = "#666666"

PALETTE = (BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

# The width, in inches, at which 11 pt text stays readable when a telephone shrinks the figure to its screen.
WIDTH = 5.6


def use() -> None:
    """Use the book's style for every figure drawn from here on."""
    plt.style.use(STYLE)
