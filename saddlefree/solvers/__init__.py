"""Solvers, one file each: ways from products with H to the direction (|H| + λI)⁻¹ g."""
