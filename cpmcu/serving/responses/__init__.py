"""OpenAI's Responses: items, output, background runs, the store."""
