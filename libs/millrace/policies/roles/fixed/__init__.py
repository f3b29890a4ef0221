"""Fixed: roles as configured."""
