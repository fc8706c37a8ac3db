"""The experiment of the chapter on the blog post about past_key_values."""

from kvreport.chapters.blog_past import past_tables

EXPERIMENTS = (past_tables.EXPERIMENT,)
