"""Parts of the documentation's build that no package has."""
