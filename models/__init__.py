"""What a drafter is made of: targets, trees, caches, and one module for each family."""
