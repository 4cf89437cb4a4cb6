"""What every interface shares of HTTP: middleware, reading bodies, server-sent events."""
