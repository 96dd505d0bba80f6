"""Find CUDA libraries and compilers on this machine (`find`), and compile csrc/ just in time (`compile`)."""
