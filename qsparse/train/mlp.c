/* Training a multilayer perceptron in C99: a batch's loss and gradients, and the step of gradient descent.
 *
 * Layer l maps sizes[l] inputs to sizes[l + 1] outputs: y = x wᵀ + b, with weights (outputs, inputs) and a ReLU behind
 * every layer but the last. All arrays are float32, row-major and contiguous; sums over a row are float32, as PyTorch's.
 * Loops are written so that the compiler can vectorise them: the innermost runs along contiguous memory.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { ROWS = 4 }; /* rows of x that share one read of a row of w */

/* y (rows, outputs) = x (rows, inputs) · wᵀ + b, through a ReLU where asked. NaN stays NaN, so that the loss tells. */
static void linear_forward(int rows, int inputs, int outputs, const float *x, const float *w, const float *b, int relu,
                           float *y) {
    for (int m = 0; m < rows; m += ROWS) {
        /* In the last, shorter group the surplus sums repeat its last row, and are not stored. */
        const float *x0 = x + (size_t)m * inputs;
        const float *x1 = x + (size_t)(m + 1 < rows ? m + 1 : rows - 1) * inputs;
        const float *x2 = x + (size_t)(m + 2 < rows ? m + 2 : rows - 1) * inputs;
        const float *x3 = x + (size_t)(m + 3 < rows ? m + 3 : rows - 1) * inputs;
        for (int n = 0; n < outputs; n++) {
            const float *row = w + (size_t)n * inputs;
            float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
            for (int k = 0; k < inputs; k++) {
                s0 += x0[k] * row[k];
                s1 += x1[k] * row[k];
                s2 += x2[k] * row[k];
                s3 += x3[k] * row[k];
            }
            const float sums[ROWS] = {s0, s1, s2, s3};
            for (int i = 0; i < ROWS && m + i < rows; i++) {
                const float value = sums[i] + b[n];
                y[(size_t)(m + i) * outputs + n] = relu && value < 0 ? 0 : value;
            }
        }
    }
}

/* d_w (outputs, inputs) = d_yᵀ · x and d_b (outputs) = the column sums of d_y: sums over the batch. */
static void linear_backward(int rows, int inputs, int outputs, const float *restrict x, const float *restrict d_y,
                            float *restrict d_w, float *restrict d_b) {
    memset(d_b, 0, (size_t)outputs * sizeof *d_b);
    for (int n = 0; n < outputs; n++) {
        float *row = d_w + (size_t)n * inputs;
        memset(row, 0, (size_t)inputs * sizeof *row);
        int m = 0;
        for (; m + ROWS <= rows; m += ROWS) {
            const float *g = d_y + (size_t)m * outputs + n;
            const float g0 = g[0], g1 = g[outputs], g2 = g[2 * (size_t)outputs], g3 = g[3 * (size_t)outputs];
            const float *x0 = x + (size_t)m * inputs, *x1 = x0 + inputs, *x2 = x1 + inputs, *x3 = x2 + inputs;
            for (int k = 0; k < inputs; k++) row[k] += g0 * x0[k] + g1 * x1[k] + g2 * x2[k] + g3 * x3[k];
            d_b[n] += g0 + g1 + g2 + g3;
        }
        for (; m < rows; m++) {
            const float g = d_y[(size_t)m * outputs + n];
            const float *from = x + (size_t)m * inputs;
            for (int k = 0; k < inputs; k++) row[k] += g * from[k];
            d_b[n] += g;
        }
    }
}

/* d_x (rows, inputs) = d_y · w, and 0 where x, the output of a ReLU, is not positive. */
static void linear_backward_input(int rows, int inputs, int outputs, const float *restrict x, const float *restrict w,
                                  const float *restrict d_y, float *restrict d_x) {
    for (int m = 0; m < rows; m++) {
        float *to = d_x + (size_t)m * inputs;
        memset(to, 0, (size_t)inputs * sizeof *to);
        for (int n = 0; n < outputs; n++) {
            const float g = d_y[(size_t)m * outputs + n];
            const float *row = w + (size_t)n * inputs;
            for (int k = 0; k < inputs; k++) to[k] += g * row[k];
        }
        const float *y = x + (size_t)m * inputs;
        for (int k = 0; k < inputs; k++) to[k] = y[k] > 0 ? to[k] : 0;
    }
}

/* The mean cross-entropy of logits (rows, classes); they become its gradient, (softmax - one-hot) / rows. */
static double softmax_cross_entropy(int rows, int classes, float *logits, const int64_t *labels) {
    double loss = 0;
    for (int m = 0; m < rows; m++) {
        float *z = logits + (size_t)m * classes;
        float largest = z[0], sum = 0;
        for (int c = 1; c < classes; c++) largest = z[c] > largest ? z[c] : largest;
        const float of_label = z[labels[m]] - largest;
        for (int c = 0; c < classes; c++) sum += z[c] = expf(z[c] - largest);
        loss += (double)logf(sum) - of_label;
        for (int c = 0; c < classes; c++) z[c] = (z[c] / sum - (c == labels[m])) / (float)rows;
    }
    return loss / rows;
}

/* The mean loss of a batch and its gradients.
 *
 * sizes: layers + 1 widths. parameters, gradients: weights and biases, layer by layer. x: (rows, sizes[0]).
 * outputs, d_outputs: for each layer, room for (rows, sizes[l + 1]).
 */
double qsparse_gradients(int layers, const int *sizes, float *const *parameters, float *const *gradients,
                         float *const *outputs, float *const *d_outputs, int rows, const float *x,
                         const int64_t *labels) {
    for (int l = 0; l < layers; l++)
        linear_forward(rows, sizes[l], sizes[l + 1], l ? outputs[l - 1] : x, parameters[2 * l], parameters[2 * l + 1],
                       l < layers - 1, outputs[l]);
    const int last = layers - 1;
    const double loss = softmax_cross_entropy(rows, sizes[layers], outputs[last], labels);
    const float *d_y = outputs[last];
    for (int l = last; l >= 0; l--) {
        linear_backward(rows, sizes[l], sizes[l + 1], l ? outputs[l - 1] : x, d_y, gradients[2 * l],
                        gradients[2 * l + 1]);
        if (l) { /* images are not trained: the first layer's input needs no gradient */
            linear_backward_input(rows, sizes[l], sizes[l + 1], outputs[l - 1], parameters[2 * l], d_y,
                                  d_outputs[l - 1]);
            d_y = d_outputs[l - 1];
        }
    }
    return loss;
}

/* One step on one array, as torch.optim.SGD: buffer and mask may be null. Where mask is 0, weight and buffer become 0. */
void qsparse_sgd(int64_t count, float *restrict parameter, const float *restrict gradient, float *restrict buffer,
                 const uint8_t *restrict mask, float lr, float momentum, float weight_decay) {
    for (int64_t i = 0; i < count; i++) {
        float g = gradient[i] + (weight_decay != 0 ? weight_decay * parameter[i] : 0);
        if (buffer) g = buffer[i] = momentum * buffer[i] + g;
        parameter[i] -= lr * g;
    }
    if (mask)
        for (int64_t i = 0; i < count; i++)
            if (!mask[i]) {
                parameter[i] = 0;
                if (buffer) buffer[i] = 0;
            }
}
