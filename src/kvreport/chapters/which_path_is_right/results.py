"""The experiments of the chapter on which path is right."""

from kvreport.chapters.which_path_is_right import path_errors

EXPERIMENTS = (path_errors.EXPERIMENT,)
