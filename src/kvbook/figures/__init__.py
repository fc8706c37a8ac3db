"""From rows to what a reader sees: one module a chapter draws, `style` sets the look, `publish` shows it."""
