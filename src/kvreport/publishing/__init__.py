"""What chapters publish: figures, tables, numbers, verdicts and citations."""
