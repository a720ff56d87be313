// Vectorised access to neighbours in memory, 16 bytes per thread, of any type. A full vector that is aligned to 16
// bytes (or to its size, if that is less) takes accesses of 16 bytes; at the end of a tensor, or in an unaligned part
// of a tensor, each element takes its own access.
#pragma once
#include "meshwork.cuh"

// Number of elements in 16 bytes: of f32, of 16-bit types, and of a given type.
#define FOUR 4
#define EIGHT 8
#define SIXTEEN_BYTES(T) (16 / static_cast<int>(sizeof(T)))

template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
    T of[N];
};

template <int N, class T> DEVICE bool are_whole(const T* x, i64 at, i64 count) {
    return at + N <= count && reinterpret_cast<u64>(x + at) % alignof(Vector<T, N>) == 0;
}

// The elements from `at` on, zeros beyond the last.
template <int N, class T> DEVICE Vector<T, N> load_vector(const T* x, i64 at, i64 count) {
    if (are_whole<N>(x, at, count)) return *reinterpret_cast<const Vector<T, N>*>(x + at);
    Vector<T, N> vector;
#pragma unroll
    for (int j = 0; j < N; j++) vector.of[j] = at + j < count ? x[at + j] : T(0);
    return vector;
}

template <class T, int N> DEVICE void store_vector(T* x, i64 at, i64 count, const Vector<T, N>& vector) {
    if (are_whole<N>(x, at, count)) {
        *reinterpret_cast<Vector<T, N>*>(x + at) = vector;
        return;
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (at + j < count) x[at + j] = vector.of[j];
    }
}

// N neighbours of 16 bits as they lie in memory, two to a word, the first in the lower half.
template <int N> struct alignas(2 * N < 16 ? 2 * N : 16) Pairs {
    u32 of[N / 2];
};

template <int N> DEVICE Pairs<N> load_pairs(const u16* x, i64 at, i64 count) {
    if (are_whole<N>(x, at, count)) return *reinterpret_cast<const Pairs<N>*>(x + at);
    Pairs<N> pairs;
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        u32 first = at + j < count ? x[at + j] : 0u, second = at + j + 1 < count ? x[at + j + 1] : 0u;
        pairs.of[j / 2] = first | second << 16;
    }
    return pairs;
}

template <int N> DEVICE void store_pairs(u16* x, i64 at, i64 count, const Pairs<N>& pairs) {
    if (are_whole<N>(x, at, count)) {
        *reinterpret_cast<Pairs<N>*>(x + at) = pairs;
        return;
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (at + j < count) x[at + j] = static_cast<u16>(pairs.of[j / 2] >> (j % 2 * 16));
    }
}

// The elements of a row of n from `column` on; after its end the row repeats from its start.
template <int N, class Row> DEVICE auto load_around(const Row& row, i64 column, i64 n) {
    if (column + N <= n) return load_vector<N>(row, column, n);
    decltype(load_vector<N>(row, column, n)) vector;
#pragma unroll
    for (int j = 0; j < N; j++) {
        vector.of[j] = row[column];
        column = column + 1 == n ? 0 : column + 1;
    }
    return vector;
}

// A row of n elements broadcast over the rows of a tensor: element at % n goes with the tensor's element `at`.
template <class Row> struct Beside {
    Row row;
    i64 n;
};

template <class Row> DEVICE Beside<Row> beside(Row row, i64 n) { return {row, n}; }

template <int N, class Row> DEVICE auto load_vector(const Beside<Row>& x, i64 at, i64) { return load_around<N>(x.row, at % x.n, x.n); }

// [outer, inner], repeated over the middle dim of a tensor [outer, extent, inner].
template <class Rows> struct Repeated {
    Rows rows;
    i64 extent, inner;
};

template <class Rows> DEVICE Repeated<Rows> repeated(Rows rows, i64 extent, i64 inner) { return {rows, extent, inner}; }

// The N neighbours of a thread in one of `rows` rows of n elements: they never cross into the next row, and the last
// group of a row may be smaller.
struct RowPlace {
    i64 row, column;
    bool there;
};

template <int N> DEVICE RowPlace row_place(i64 rows, i64 n) {
    i64 each = (n + N - 1) / N, at = global_thread();
    return {at / each, at % each * N, at < rows * each};
}

// Calls use(i, load(i)) for the numbers begin .. end in order. AHEAD numbers are loaded before the first is used:
// `load` only loads, and `use` does all that depends on the loaded values.
template <int AHEAD = 4, class Load, class Use> DEVICE void in_order(i64 begin, i64 end, Load load, Use use) {
    i64 next = begin;
    for (; next + AHEAD <= end; next += AHEAD) {
        decltype(load(next)) loaded[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) loaded[i] = load(next + i);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) use(next + i, loaded[i]);
    }
    for (; next < end; next++) use(next, load(next));
}

// Rows of n elements, where row i is row source(i) of x, or zeros if that is negative. Loads the elements from `at` on,
// of `count`.
template <int N, class X, class Source> DEVICE auto load_rows(const X& x, i64 at, i64 count, i64 n, Source source) {
    i64 row = at / n, column = at % n, from = source(row);
    decltype(load_vector<N>(x, column, n)) vector = {};
    if (column + N <= n) return from < 0 ? vector : load_vector<N>(x + from * n, column, n);
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (at + j < count && from >= 0) vector.of[j] = x[from * n + column];
        if (++column == n) {
            column = 0, row++;
            from = at + j + 1 < count ? source(row) : -1;
        }
    }
    return vector;
}

template <int N, class Rows> DEVICE auto load_vector(const Repeated<Rows>& x, i64 at, i64 count) {
    return load_rows<N>(x.rows, at, count, x.inner, [&](i64 row) { return row / x.extent; });
}

// out = f(x).
template <int N, class X, class Out, class F> DEVICE void map_vectors(X x, Out out, i64 count, F f) {
    i64 at = global_thread() * N;
    if (at >= count) return;
    auto a = load_vector<N>(x, at, count);
    Vector<decltype(f(a.of[0])), N> result;
#pragma unroll
    for (int j = 0; j < N; j++) result.of[j] = f(a.of[j]);
    store_vector(out, at, count, result);
}

// out = f(x, y).
template <int N, class X, class Y, class Out, class F> DEVICE void join_vectors(X x, Y y, Out out, i64 count, F f) {
    i64 at = global_thread() * N;
    if (at >= count) return;
    auto a = load_vector<N>(x, at, count);
    auto b = load_vector<N>(y, at, count);
    Vector<decltype(f(a.of[0], b.of[0])), N> result;
#pragma unroll
    for (int j = 0; j < N; j++) result.of[j] = f(a.of[j], b.of[j]);
    store_vector(out, at, count, result);
}
