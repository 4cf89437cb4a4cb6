"""The programs in the terminal: what `cpmcu run`, `chat` and their helpers are made of."""
