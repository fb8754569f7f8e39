"""The method: rectified layers, their tasks, their files and their cost. Knows torch and nothing else of the package."""
