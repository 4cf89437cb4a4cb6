"""The HTTP server: one model behind the interfaces of OpenAI, Anthropic, llama.cpp and SGLang."""
