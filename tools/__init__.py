"""The doors of the course, one script each: Colab, the offline kit, the student edition, slides."""
