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

/* Every function that can fail returns NULL or a non-zero number, and then unflip_error() tells why, for the thread that called. */
UNFLIP_API const char* unflip_error(void);
UNFLIP_API const char* unflip_version(void);

/* threads: 1 or more; 0: as many as the machine has cores. The instruction set is the best the CPU has, or what the environment variable
   UNFLIP_ISA names. */
UNFLIP_API unflip_model* unflip_load(const char* path, int threads);
UNFLIP_API unflip_model* unflip_load_memory(const void* data, size_t size, int threads);
UNFLIP_API void unflip_free(unflip_model* model);

/* Channels, height, width of a sample. The output's is that of a network with one output: of another it is 0, 0, 0, and non-zero
   is returned. */
UNFLIP_API void unflip_input_shape(const unflip_model* model, int shape[3]);
UNFLIP_API int unflip_output_shape(const unflip_model* model, int shape[3]);

/* For a network with one output. input: batch samples of C x H x W floats; output: room for as many samples of the output's shape.
   NaN in the input is refused. Several threads may run one model at once. Returns 0, or non-zero on an error. */
UNFLIP_API int unflip_run(unflip_model* model, const float* input, int batch, float* output);

/* The same, and adds the seconds spent in each op to seconds[0 .. unflip_ops - 1]. */
UNFLIP_API int unflip_profile(unflip_model* model, const float* input, int batch, float* output, double* seconds);
UNFLIP_API int unflip_ops(const unflip_model* model);
UNFLIP_API const char* unflip_op_name(const unflip_model* model, int op); /* "conv layer1.0.conv1" */

/* A network may have several outputs, numbered from 0. Where there is no such output, its name is "", its shape 0, 0, 0, and non-zero
   is returned. A network with one output can be used either way; where its model returned a tensor alone, that is called "output". */
UNFLIP_API int unflip_outputs(const unflip_model* model);
UNFLIP_API const char* unflip_output_name(const unflip_model* model, int output);
UNFLIP_API int unflip_shape_of_output(const unflip_model* model, int output, int shape[3]);
UNFLIP_API const char* unflip_structure(const unflip_model* model); /* what the model returned: "tensor", "tuple" or "dict" */

/* As unflip_run and unflip_profile; outputs[0 .. unflip_outputs - 1] each have room for batch samples of their output's shape. */
UNFLIP_API int unflip_run_outputs(unflip_model* model, const float* input, int batch, float* const* outputs);
UNFLIP_API int unflip_profile_outputs(unflip_model* model, const float* input, int batch, float* const* outputs, double* seconds);

/* JSON texts of the file; "null" where it has none. */
UNFLIP_API const char* unflip_preprocess(const unflip_model* model);
UNFLIP_API const char* unflip_labels(const unflip_model* model);
UNFLIP_API const char* unflip_isa(const unflip_model* model);
UNFLIP_API int unflip_threads(const unflip_model* model);

#ifdef __cplusplus
}
#endif
#endif
