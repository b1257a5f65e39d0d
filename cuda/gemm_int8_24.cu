// The int8 product with 2:4 weights where there are no sparse tensor cores: w is expanded for the dense product.
#include "common/expand_24.cuh"
