"""The prefix cache: pages of keys and values that outlive the sequence that computed them."""
