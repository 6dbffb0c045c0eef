"""Other packages: models under accelerate's hooks, and torchvision without CUDA."""
