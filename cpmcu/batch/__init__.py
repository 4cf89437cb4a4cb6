"""`cpmcu run --batch`: answers the requests of a JSON Lines file through continuous batching."""
