"""What every package needs: errors, arrays, compiled kernels, files."""
