"""What is known of a card, and the metal that obeys a plan on it."""
