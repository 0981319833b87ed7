"""Station 3 of the path: make a step durable, and find it again."""
