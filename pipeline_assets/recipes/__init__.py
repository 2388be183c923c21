"""The built-in recipes, one YAML file each."""
