"""Terminal output: text, tables, progress and summaries."""
