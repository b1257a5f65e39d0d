// y = act(x · wᵀ + bias), w being 2:4, where there are no sparse tensor cores: w is expanded for the dense product.
#include "common/expand_24.cuh"
