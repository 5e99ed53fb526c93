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

/* A network that is ready to run. Any number of threads may call all functions except unflip_free on one model at the same time.
   Free a model only when no other thread uses it. */
typedef struct unflip_model unflip_model;

/* A function that fails returns NULL or a non-zero number; functions that return a count, a size or a string return 0 or "".
   unflip_error() then returns the reason, for the calling thread. It is valid until that thread's next failure, and contains no
   control characters. A model or an array that is NULL is an error. */
UNFLIP_API const char* unflip_error(void);
UNFLIP_API const char* unflip_version(void);

/* What a file may ask for. It is computed from the graph and compared with these limits before memory is allocated. Raise them
   only for files that you trust. 0 is the default. */
typedef struct unflip_limits {
  uint64_t max_memory; /* bytes for loading the network and running one sample; the default is 2^30 (1 GiB) */
  uint64_t max_work;   /* for one sample, and for loading: units of about a nanosecond; the default is 10^10 */
} unflip_limits;

/* threads: 1 or more, or 0 for one per core. limits: NULL for the defaults. The environment variable UNFLIP_ISA selects the
   instruction set; the default is the best one that the CPU supports. unflip_load_memory does not keep the data: it may be freed
   after the call. The model belongs to the caller: unflip_free it. unflip_free(NULL) does nothing. */
UNFLIP_API unflip_model* unflip_load(const char* path, int threads, const unflip_limits* limits);
UNFLIP_API unflip_model* unflip_load_memory(const void* data, size_t size, int threads, const unflip_limits* limits);
UNFLIP_API void unflip_free(unflip_model* model);

/* The numbers that were compared with the limits: bounds on the memory for loading and one run, and on the work of one sample.
   The memory does not include input and output, nor further runs at the same time. */
UNFLIP_API uint64_t unflip_memory_needed(const unflip_model* model);
UNFLIP_API uint64_t unflip_work_needed(const unflip_model* model);

/* Channels, height and width of a sample. unflip_output_shape is for networks with one output: for others it sets 0, 0, 0 and
   returns non-zero. */
UNFLIP_API int unflip_input_shape(const unflip_model* model, int shape[3]);
UNFLIP_API int unflip_output_shape(const unflip_model* model, int shape[3]);

/* Strings that the functions below return belong to the model and are valid until it is freed. Names and labels are those of the
   file: they may contain control characters. Print them with unflip_printable. */

/* Copies text to `to`, with escapes such as \x1b instead of control characters, invisible characters, and those that change the
   direction of text. Copies at most size - 1 bytes, then a NUL. Returns the length of the whole text; (size_t)-1 on an error. */
UNFLIP_API size_t unflip_printable(const char* text, char* to, size_t size);

/* For networks with one output. input: batch samples of C x H x W floats. output: space for batch samples of the output's shape.
   NaN or an infinity in the input is an error. Returns 0, or non-zero on an error. */
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
/* The dimensions of a sample's result: 1 (channels) or 3. */
UNFLIP_API int unflip_output_dims(const unflip_model* model, int output);
UNFLIP_API const char* unflip_structure(const unflip_model* model); /* what the model returned: "tensor", "tuple" or "dict" */

/* Like unflip_run and unflip_profile. outputs[0 .. unflip_outputs - 1] each have space for batch samples of the output's shape. */
UNFLIP_API int unflip_run_outputs(unflip_model* model, const float* input, int batch, float* const* outputs);
UNFLIP_API int unflip_profile_outputs(unflip_model* model, const float* input, int batch, float* const* outputs, double* seconds);

/* A network with 8-bit ends takes images as pixels 0 .. 255, without a conversion to floats: unflip_takes_pixels is then 1. The
   results are those of the normalized floats (pixel / 255 - mean) / std, to the last bit. input: batch samples of C x H x W bytes.
   outputs: as above. seconds: NULL, or as for unflip_profile. */
UNFLIP_API int unflip_takes_pixels(const unflip_model* model);
UNFLIP_API int unflip_run_pixels(unflip_model* model, const uint8_t* input, int batch, float* const* outputs, double* seconds);

/* JSON from the file; "null" if the file has none. */
UNFLIP_API const char* unflip_preprocess(const unflip_model* model);
UNFLIP_API const char* unflip_labels(const unflip_model* model);
UNFLIP_API const char* unflip_isa(const unflip_model* model);
UNFLIP_API int unflip_threads(const unflip_model* model);

#ifdef __cplusplus
}
#endif
#endif
