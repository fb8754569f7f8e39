"""The method: rectified layers, their tasks, files and cost. Knows torch and nothing else of the package."""
