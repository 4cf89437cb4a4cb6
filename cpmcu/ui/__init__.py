"""Terminal output. Only this part of the package prints."""
