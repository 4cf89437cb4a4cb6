"""HTTP code that all interfaces share: middleware, reading bodies, server-sent events."""
