"""The inference engine that both roles share."""
