"""What the chapter on serving engines measures."""

from kvreport.chapters.serving_engines.measuring import EXPERIMENTS  # noqa: F401
