"""Device meshes and collectives."""
