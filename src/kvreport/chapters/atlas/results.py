"""The experiment of the chapter on the atlas."""

from kvreport.chapters.atlas import survey

EXPERIMENTS = (survey.EXPERIMENT,)
