"""The experiments of the chapter on the thread about a model from scratch."""

from kvreport.chapters.from_scratch import logits, loss, speed, texts

EXPERIMENTS = (logits.EXPERIMENT, loss.EXPERIMENT, loss.HELD, texts.EXPERIMENT, speed.EXPERIMENT)
