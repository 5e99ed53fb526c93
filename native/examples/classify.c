/* Classifies an image with a packed network, in C.

     gcc classify.c -I DIR -L DIR -lunflip -Wl,-rpath,DIR -o classify
     ./classify model.unflip image.ppm

   DIR has unflip.h and libunflip.so: a CMake build of native/, or the folder that the Python package has them in,
     python -c "import unflip.runtime; print(unflip.runtime.c_folder())"
   The image is a binary PPM (colour) or PGM (grey) with 256 levels, and has the model's size. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "unflip.h"

static int fail(const char* what) {
  fprintf(stderr, "classify: %s\n", what);
  return 1;
}

/* Reads the next number of the image's header, which may contain comments. */
static int read_number(FILE* file) {
  int c = fgetc(file), number = 0, digits = 0;
  for (; isspace(c) || c == '#'; c = fgetc(file))
    if (c == '#')
      while (c != '\n' && c != EOF) c = fgetc(file);
  for (; isdigit(c) && digits < 6; c = fgetc(file), digits++) number = number * 10 + (c - '0');
  return digits > 0 && isspace(c) ? number : -1;
}

/* Finds "name":[a,b,...] in the file's JSON and reads count numbers. */
static int read_list(const char* json, const char* name, double* numbers, int count) {
  const char* at = strstr(json, name);
  if (at == NULL || (at = strchr(at, '[')) == NULL) return 0;
  for (int i = 0; i < count; i++) {
    char* end;
    numbers[i] = strtod(at + 1, &end);
    if (end == at + 1) return 0;
    at = end;
  }
  return 1;
}

/* Pixels as C x H x W, normalized as the file specifies: (pixel / 255 - mean) / std. */
static float* read_image(const char* path, const int shape[3], const char* preprocess) {
  const int channels = shape[0], height = shape[1], width = shape[2];
  double mean[3] = {0, 0, 0}, deviation[3] = {1, 1, 1};
  if (channels != 1 && channels != 3) return fail("this model takes no image of 1 or 3 channels"), NULL;
  if (strcmp(preprocess, "null") != 0 &&
      !(read_list(preprocess, "\"mean\"", mean, channels) && read_list(preprocess, "\"std\"", deviation, channels)))
    return fail("the model's preprocessing cannot be read"), NULL;
  FILE* file = fopen(path, "rb");
  if (file == NULL) return fail("the image cannot be opened"), NULL;
  char magic[2] = {0, 0};
  const size_t size = (size_t)channels * (size_t)height * (size_t)width;
  float* values = NULL;
  unsigned char* pixels = malloc(size);
  if (pixels == NULL || fread(magic, 1, 2, file) != 2 || magic[0] != 'P' || magic[1] != (channels == 3 ? '6' : '5')) {
    fail(channels == 3 ? "the image must be a binary PPM (P6)" : "the image must be a binary PGM (P5)");
  } else if (read_number(file) != width || read_number(file) != height || read_number(file) != 255) {
    fprintf(stderr, "classify: the image must have %d x %d pixels and 256 levels\n", width, height);
  } else if (fread(pixels, 1, size, file) != size) {
    fail("the image is cut off");
  } else if ((values = malloc(size * sizeof *values)) != NULL) {
    for (size_t i = 0; i < size; i++) { /* from H x W x C to C x H x W */
      const size_t channel = i % (size_t)channels, pixel = i / (size_t)channels;
      values[channel * (size_t)(height * width) + pixel] = (float)((pixels[i] / 255.0 - mean[channel]) / deviation[channel]);
    }
  }
  free(pixels);
  fclose(file);
  return values;
}

/* Prints label number `index` of a JSON list of strings, as written there, or the number if there is no label. */
static void print_label(const char* labels, int index) {
  const char* at = strchr(labels, '"');
  for (int i = 0; at != NULL; i++) {
    const char* end = at + 1;
    while (*end != '"') end += *end == '\\' ? 2 : 1;
    if (i == index) {
      char label[200], shown[4 * sizeof label]; /* a terminal must not interpret text from a file */
      snprintf(label, sizeof label, "%.*s", (int)(end - at - 1), at + 1);
      unflip_printable(label, shown, sizeof shown);
      printf("%s", shown);
      return;
    }
    at = strchr(end + 1, '"');
  }
  printf("class %d", index);
}

static void print_best(const unflip_model* model, float* outputs, int classes) {
  for (int rank = 0; rank < 5 && rank < classes; rank++) {
    int best = 0;
    for (int i = 1; i < classes; i++)
      if (outputs[i] > outputs[best]) best = i;
    printf("%10.4f  ", (double)outputs[best]);
    print_label(unflip_labels(model), best);
    printf("\n");
    outputs[best] = -3.4e38f;
  }
}

int main(int count, char** arguments) {
  if (count != 3) return fail("usage: classify MODEL.unflip IMAGE.ppm");
  unflip_model* model = unflip_load(arguments[1], 1, NULL);
  if (model == NULL) return fail(unflip_error());
  int in[3], out[3], failed = 1;
  unflip_input_shape(model, in);
  if (unflip_output_shape(model, out) != 0) { /* several outputs, such as a detector's: not only class scores */
    fail(unflip_error());
    unflip_free(model);
    return 1;
  }
  float* input = read_image(arguments[2], in, unflip_preprocess(model));
  float* output = malloc(sizeof(float) * (size_t)out[0] * (size_t)out[1] * (size_t)out[2]);
  if (input != NULL && output != NULL) {
    failed = unflip_run(model, input, 1, output);
    if (failed) {
      fail(unflip_error());
    } else {
      print_best(model, output, out[0] * out[1] * out[2]);
    }
  }
  free(input);
  free(output);
  unflip_free(model);
  return failed;
}
