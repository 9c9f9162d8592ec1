"""What OpenAI's API says: the bodies of requests, validated, and of replies."""
