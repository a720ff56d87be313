// Windows that slide over images, channels last: patches of convolutions, and pools
// (crates/tensor/src/kernel/windows.rs).
//
//   patches[w, e] = the pixel under element e of window w, 0 beyond the edges;  dx = for each pixel Σ over the windows that contain it
//   max pool: the largest pixel of each window, NaN above all, ties to the first; its place counts pixels of the window, padding included
//   average pool: Σ over the window / (down · across), padding counted
//
// Shapes    x, dx [samples, height, width, channels]; windows [samples, rows, columns]; patches [windows, down, across,
//           channels]; pools and places [windows, channels], places in bytes or i32.
// Geometry  one thread per element of the output. A thread of dx gathers from its windows in order, so no two threads
//           add to one element.
// Bytes     patches 4 read and 4 written per element; dx reads its elements of the windows and writes 4; pools read the
//           window and write 4 + place.
// Bits      as on the CPU: crates/cpu/src/kernels/windows.rs.
#include "math.cuh"

// The windows, as arguments of all kernels; in padded coordinates the image begins at `padding`.
struct Windows {
    i64 height, width, channels, rows, columns, down, across, stride, padding;
};

// The window and the channel of an element of [samples, rows, columns, channels]: the sample, and the start of the
// window.
struct Corner {
    i64 sample, top, left, channel;
};

DEVICE Corner corner(const Windows& w, i64 at) {
    i64 channel = at % w.channels, window = at / w.channels;
    i64 column = window % w.columns, row = window / w.columns % w.rows;
    return {window / w.columns / w.rows, row * w.stride - w.padding, column * w.stride - w.padding, channel};
}

DEVICE bool inside(const Windows& w, i64 row, i64 column) { return row >= 0 && row < w.height && column >= 0 && column < w.width; }

DEVICE i64 pixel(const Windows& w, i64 sample, i64 row, i64 column, i64 channel) {
    return ((sample * w.height + row) * w.width + column) * w.channels + channel;
}

// Calls each(window, place) for the windows that contain an element of an image, in order.
template <class Each> DEVICE void for_holders(const Windows& w, i64 at, Each each) {
    i64 column = at / w.channels % w.width + w.padding, row = at / w.channels / w.width % w.height + w.padding;
    i64 sample = at / w.channels / w.width / w.height;
    i64 first_row = row < w.down ? 0 : (row - w.down) / w.stride + 1, first_column = column < w.across ? 0 : (column - w.across) / w.stride + 1;
    for (i64 i = first_row; i < w.rows && i * w.stride <= row; ++i)
        for (i64 j = first_column; j < w.columns && j * w.stride <= column; ++j)
            each((sample * w.rows + i) * w.columns + j, (row - i * w.stride) * w.across + column - j * w.stride);
}

KERNEL patches_forward(
    const float* x, float* out, i64 count, i64 height, i64 width, i64 channels, i64 rows, i64 columns, i64 down, i64 across, i64 stride, i64 padding) {
    i64 at = global_thread();
    if (at >= count) return;
    Windows w{height, width, channels, rows, columns, down, across, stride, padding};
    i64 place = at / channels % (down * across), window = at / channels / (down * across);
    Corner from = corner(w, window * channels + at % channels);
    i64 row = from.top + place / across, column = from.left + place % across;
    out[at] = inside(w, row, column) ? x[pixel(w, from.sample, row, column, from.channel)] : 0.0f;
}

KERNEL patches_backward(
    const float* dpatches, float* dx, i64 count, i64 height, i64 width, i64 channels, i64 rows, i64 columns, i64 down, i64 across, i64 stride,
    i64 padding) {
    i64 at = global_thread();
    if (at >= count) return;
    float sum = 0.0f;
    for_holders({height, width, channels, rows, columns, down, across, stride, padding}, at, [&](i64 window, i64 place) {
        sum += dpatches[(window * down * across + place) * channels + at % channels];
    });
    dx[at] = sum;
}

template <class Place> DEVICE void max_pool(const Windows& w, const float* x, float* out, Place* places, i64 at) {
    Corner from = corner(w, at);
    float best = -INFINITE;
    i64 best_place = -1;
    for (i64 place = 0; place < w.down * w.across; ++place) {
        i64 row = from.top + place / w.across, column = from.left + place % w.across;
        if (!inside(w, row, column)) continue;
        float value = x[pixel(w, from.sample, row, column, from.channel)];
        // NaN replaces any number and is never replaced. If no pixel beats -∞, the first pixel is the place.
        bool beats = value > best || (value != value && best == best);
        if (beats || best_place < 0) best_place = place;
        if (beats) best = value;
    }
    out[at] = best;
    places[at] = static_cast<Place>(best_place < 0 ? 0 : best_place);
}

KERNEL max_pool_forward_u8(
    const float* x, float* out, u8* places, i64 count, i64 height, i64 width, i64 channels, i64 rows, i64 columns, i64 down, i64 across, i64 stride,
    i64 padding) {
    i64 at = global_thread();
    if (at < count) max_pool({height, width, channels, rows, columns, down, across, stride, padding}, x, out, places, at);
}

KERNEL max_pool_forward_i32(
    const float* x, float* out, int* places, i64 count, i64 height, i64 width, i64 channels, i64 rows, i64 columns, i64 down, i64 across, i64 stride,
    i64 padding) {
    i64 at = global_thread();
    if (at < count) max_pool({height, width, channels, rows, columns, down, across, stride, padding}, x, out, places, at);
}

template <class Place> DEVICE void max_pool_back(const Windows& w, const float* dy, const Place* places, float* dx, i64 at) {
    float sum = 0.0f;
    for_holders(w, at, [&](i64 window, i64 place) {
        i64 of = window * w.channels + at % w.channels;
        if (static_cast<i64>(places[of]) == place) sum += dy[of];
    });
    dx[at] = sum;
}

KERNEL max_pool_backward_u8(
    const float* dy, const u8* places, float* dx, i64 count, i64 height, i64 width, i64 channels, i64 rows, i64 columns, i64 down, i64 across,
    i64 stride, i64 padding) {
    i64 at = global_thread();
    if (at < count) max_pool_back({height, width, channels, rows, columns, down, across, stride, padding}, dy, places, dx, at);
}

KERNEL max_pool_backward_i32(
    const float* dy, const int* places, float* dx, i64 count, i64 height, i64 width, i64 channels, i64 rows, i64 columns, i64 down, i64 across,
    i64 stride, i64 padding) {
    i64 at = global_thread();
    if (at < count) max_pool_back({height, width, channels, rows, columns, down, across, stride, padding}, dy, places, dx, at);
}

KERNEL average_pool_forward(
    const float* x, float* out, i64 count, i64 height, i64 width, i64 channels, i64 rows, i64 columns, i64 down, i64 across, i64 stride, i64 padding) {
    i64 at = global_thread();
    if (at >= count) return;
    Windows w{height, width, channels, rows, columns, down, across, stride, padding};
    Corner from = corner(w, at);
    float sum = 0.0f;
    for (i64 place = 0; place < down * across; ++place) {
        i64 row = from.top + place / across, column = from.left + place % across;
        if (inside(w, row, column)) sum += x[pixel(w, from.sample, row, column, from.channel)];
    }
    out[at] = sum / static_cast<float>(down * across);
}

KERNEL average_pool_backward(
    const float* dy, float* dx, i64 count, i64 height, i64 width, i64 channels, i64 rows, i64 columns, i64 down, i64 across, i64 stride, i64 padding) {
    i64 at = global_thread();
    if (at >= count) return;
    float sum = 0.0f, area = static_cast<float>(down * across);
    for_holders({height, width, channels, rows, columns, down, across, stride, padding}, at, [&](i64 window, i64) {
        sum += dy[window * channels + at % channels] / area;
    });
    dx[at] = sum;
}
