"""The HTTP door: the part of OpenAI's protocol that its clients need, and what operators read."""
