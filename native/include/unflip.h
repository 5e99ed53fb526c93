/* unflip: runs packed 1-bit networks (.unflip files, see docs/format.md). C API of the native library; unflip.hpp is for C++.

   Rules for all functions:
   - Errors: the comment of a function says what it returns if it fails. unflip_error() then has the reason. A function that
     fails changes nothing but the arrays that its comment names. No C++ exception leaves the library.
   - NULL is an error for every pointer, except where a comment allows it.
   - Ownership: no function keeps a pointer that it is given. The only object that the caller must free is a model.
   - Strings that are returned are UTF-8 with a NUL at the end, and must not be freed or changed. Those of a model are valid until
     it is freed. Names and labels come from the file and may contain control characters: print them with unflip_printable.
   - Threads: any number of threads may call any functions at the same time, also on one model and also unflip_run. The only
     exception is unflip_free: no other call on the same model may be running or follow.
   - fork: in the child, models that the parent has loaded still run, on one thread each. */
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

/* A network that is ready to run. */
typedef struct unflip_model unflip_model;

/* The reason of the calling thread's latest failure, without control characters; "" before the first one. Calls that succeed do
   not change it. It is valid until the next failure in this thread, or the thread's end. */
UNFLIP_API const char* unflip_error(void);

/* The version of the library, such as "0.1.0". It is valid as long as the library is loaded. */
UNFLIP_API const char* unflip_version(void);

/* ---- Loading */

/* What a file may ask for. It is computed from the graph and compared with these limits before memory is allocated. Raise them
   only for files that you trust. */
typedef struct unflip_limits {
  uint64_t max_memory; /* bytes for loading the network and running one sample; 0: the default, 2^30 (1 GiB) */
  uint64_t max_work;   /* for one sample, and for loading: units of about a nanosecond; 0: the default, 10^10 */
} unflip_limits;

/* Loads and checks a file. threads: how many threads share the work of one run, 1 .. 1024, or 0 for one per core. limits: may be
   NULL for the defaults. The environment variable UNFLIP_ISA selects the instruction set; the default is the best one that the
   CPU supports. Do not change the environment in another thread during the call.
   The model belongs to the caller, who must unflip_free it. NULL on an error. */
UNFLIP_API unflip_model* unflip_load(const char* path, int threads, const unflip_limits* limits);

/* The same for a file in memory. The data are not needed after the call. */
UNFLIP_API unflip_model* unflip_load_memory(const void* data, size_t size, int threads, const unflip_limits* limits);

/* Frees the model and all strings that were returned for it. The model may be NULL: then nothing happens. See Threads above. */
UNFLIP_API void unflip_free(unflip_model* model);

/* ---- The network. Unless a comment says otherwise: 0 or "" on an error. */

/* The number that was compared with max_memory: a bound on the bytes for loading the network and running one sample, including
   the sample and its outputs. Each further run at the same time, on another thread, may take as much again. */
UNFLIP_API uint64_t unflip_memory_needed(const unflip_model* model);

/* The number that was compared with max_work: a bound on the work of one sample. */
UNFLIP_API uint64_t unflip_work_needed(const unflip_model* model);

/* Sets channels, height and width of a sample. Returns 0; on an error non-zero. */
UNFLIP_API int unflip_input_shape(const unflip_model* model, int shape[3]);

/* The same for the output of a network that has only one. On an error, such as several outputs: non-zero, and 0, 0, 0. */
UNFLIP_API int unflip_output_shape(const unflip_model* model, int shape[3]);

/* The number of outputs, 1 or more. They are numbered from 0. */
UNFLIP_API int unflip_outputs(const unflip_model* model);

/* The name of an output; "output" for the only one of a network that returns a tensor. */
UNFLIP_API const char* unflip_output_name(const unflip_model* model, int output);

/* Sets channels, height and width of an output of one sample. Returns 0; on an error non-zero, and 0, 0, 0. */
UNFLIP_API int unflip_shape_of_output(const unflip_model* model, int output, int shape[3]);

/* The dimensions of an output of one sample: 1 (only channels) or 3. */
UNFLIP_API int unflip_output_dims(const unflip_model* model, int output);

/* What the model returned before it was packed: "tensor", "tuple" or "dict". */
UNFLIP_API const char* unflip_structure(const unflip_model* model);

/* The number of class names. 0 also if the file has none. */
UNFLIP_API int unflip_labels(const unflip_model* model);

/* Class name number `label`, from 0. It is the name of that channel of an output with unflip_labels channels. */
UNFLIP_API const char* unflip_label(const unflip_model* model, int label);

/* 1 if the file has the normalization of images, 0 if not. */
UNFLIP_API int unflip_has_preprocess(const unflip_model* model);

/* Sets mean and standard deviation of each channel of the input: arrays of as many numbers as the input has channels. An image
   with values 0 .. 255 becomes input by (pixel / 255 - mean) / deviation. Without a normalization in the file, the mean is 0 and
   the deviation 1. Returns 0; on an error non-zero. */
UNFLIP_API int unflip_preprocess(const unflip_model* model, double* mean, double* deviation);

/* The number of ops. They are numbered from 0. */
UNFLIP_API int unflip_ops(const unflip_model* model);

/* Kind and name of an op: "conv layer1.0.conv1". */
UNFLIP_API const char* unflip_op_name(const unflip_model* model, int op);

/* The instruction set in use: "portable", "avx2", "avx512" or "neon". */
UNFLIP_API const char* unflip_isa(const unflip_model* model);

/* The number of threads that share the work of one run. */
UNFLIP_API int unflip_threads(const unflip_model* model);

/* ---- Running. Input and output belong to the caller, must not overlap, and are not used after the call. */

/* For networks with one output. input: batch samples of C x H x W floats, all finite. output: space for batch samples of the
   output's shape. Runs at the same time have separate buffers, which the model keeps for later runs. If another run is using the
   model's threads, this one uses only the calling thread. Returns 0; on an error non-zero, and the output is undefined. */
UNFLIP_API int unflip_run(unflip_model* model, const float* input, int batch, float* output);

/* Like unflip_run; also adds the seconds spent in each op to seconds[0 .. unflip_ops - 1]. */
UNFLIP_API int unflip_profile(unflip_model* model, const float* input, int batch, float* output, double* seconds);

/* Like unflip_run, for any number of outputs: outputs[0 .. unflip_outputs - 1] each have space for batch samples. */
UNFLIP_API int unflip_run_outputs(unflip_model* model, const float* input, int batch, float* const* outputs);

/* Like unflip_run_outputs; also adds the seconds spent in each op to seconds[0 .. unflip_ops - 1]. */
UNFLIP_API int unflip_profile_outputs(unflip_model* model, const float* input, int batch, float* const* outputs, double* seconds);

/* 1 if the network takes images as pixels 0 .. 255, without a conversion to floats: it has an 8-bit first convolution, and the file
   says how images are normalized. Otherwise, and on an error, 0. */
UNFLIP_API int unflip_takes_pixels(const unflip_model* model);

/* Like unflip_run_outputs, for batch samples of C x H x W pixels. The results are those of the normalized floats
   (pixel / 255 - mean) / std, to the last bit. seconds: NULL, or as for unflip_profile. */
UNFLIP_API int unflip_run_pixels(unflip_model* model, const uint8_t* input, int batch, float* const* outputs, double* seconds);

/* ---- Text */

/* Copies text to `to`, with escapes such as \x1b instead of control characters, invisible characters, and those that change the
   direction of text. Copies at most size - 1 bytes, then a NUL. `to` may be NULL if size is 0. Returns the length of the whole
   text; (size_t)-1 on an error. */
UNFLIP_API size_t unflip_printable(const char* text, char* to, size_t size);

#ifdef __cplusplus
}
#endif
#endif
