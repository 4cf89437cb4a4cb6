"""Parts of the terminal programs: `cpmcu run`, `chat`, `completion`, `env`, `list` and `plan`."""
