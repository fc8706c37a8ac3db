"""The chapters: each folder holds what one asks, measures, tabulates, draws and judges."""
