/* unflip: runs packed 1-bit networks (.unflip files, see docs/format.md). C API of the native library. */
#ifndef UNFLIP_H
#define UNFLIP_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define UNFLIP_API __declspec(dllexport)
#else
#define UNFLIP_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct unflip_model unflip_model;

/* A function that fails returns NULL or a non-zero number. unflip_error() then returns the reason, for the calling thread. */
UNFLIP_API const char* unflip_error(void);
UNFLIP_API const char* unflip_version(void);

/* threads: 1 or more, or 0 for one per core. The environment variable UNFLIP_ISA selects the instruction set; the default is the
   best one that the CPU supports. */
UNFLIP_API unflip_model* unflip_load(const char* path, int threads);
UNFLIP_API unflip_model* unflip_load_memory(const void* data, size_t size, int threads);
UNFLIP_API void unflip_free(unflip_model* model);

/* Channels, height and width of a sample. unflip_output_shape is for networks with one output: for others it sets 0, 0, 0 and
   returns non-zero. */
UNFLIP_API void unflip_input_shape(const unflip_model* model, int shape[3]);
UNFLIP_API int unflip_output_shape(const unflip_model* model, int shape[3]);

/* For networks with one output. input: batch samples of C x H x W floats. output: space for batch samples of the output's shape.
   NaN in the input is an error. Several threads may run one model at the same time. Returns 0, or non-zero on an error. */
UNFLIP_API int unflip_run(unflip_model* model, const float* input, int batch, float* output);

/* Like unflip_run; also adds the seconds spent in each op to seconds[0 .. unflip_ops - 1]. */
UNFLIP_API int unflip_profile(unflip_model* model, const float* input, int batch, float* output, double* seconds);
UNFLIP_API int unflip_ops(const unflip_model* model);
UNFLIP_API const char* unflip_op_name(const unflip_model* model, int op); /* "conv layer1.0.conv1" */

/* A network may have several outputs, numbered from 0. For a number out of range, the name is "", the shape is 0, 0, 0, and
   non-zero is returned. These functions also work for networks with one output. The name of a single tensor is "output". */
UNFLIP_API int unflip_outputs(const unflip_model* model);
UNFLIP_API const char* unflip_output_name(const unflip_model* model, int output);
UNFLIP_API int unflip_shape_of_output(const unflip_model* model, int output, int shape[3]);
UNFLIP_API const char* unflip_structure(const unflip_model* model); /* what the model returned: "tensor", "tuple" or "dict" */

/* Like unflip_run and unflip_profile. outputs[0 .. unflip_outputs - 1] each have space for batch samples of the output's shape. */
UNFLIP_API int unflip_run_outputs(unflip_model* model, const float* input, int batch, float* const* outputs);
UNFLIP_API int unflip_profile_outputs(unflip_model* model, const float* input, int batch, float* const* outputs, double* seconds);

/* JSON from the file; "null" if the file has none. */
UNFLIP_API const char* unflip_preprocess(const unflip_model* model);
UNFLIP_API const char* unflip_labels(const unflip_model* model);
UNFLIP_API const char* unflip_isa(const unflip_model* model);
UNFLIP_API int unflip_threads(const unflip_model* model);

#ifdef __cplusplus
}
#endif
#endif
